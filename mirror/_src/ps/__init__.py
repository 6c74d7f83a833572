"""The parameter server, on Ray."""
