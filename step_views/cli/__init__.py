"""Commands about recorded and predicted steps, and what every command's options and output are made of."""
