"""Steps that never ran: what their operations would cost, as a program for the simulator."""
