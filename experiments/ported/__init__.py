"""One experiment of each of PFLlib, FL-Simulator, FL-bench and NIID-Bench, line by line. `__main__.py` runs them."""
