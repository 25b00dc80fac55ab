"""The same step at another size: where its shapes come from, and where its times."""
