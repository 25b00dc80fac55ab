"""Commands about recorded and predicted steps, and the parts of every command: its options and its output."""
