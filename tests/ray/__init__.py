"""The Ray backend and Ray Serve, on a cluster of two nodes on this machine."""
