"""From one GPU's step to a cluster's: parallel plans, their memory, their schedule and their collectives."""
