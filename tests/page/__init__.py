"""The page at / in a browser, on this machine only."""
