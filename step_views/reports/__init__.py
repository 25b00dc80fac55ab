"""Reports on recorded and predicted steps."""
