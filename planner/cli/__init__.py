"""Commands that plan: clusters, servers, sharded tables and networks."""
