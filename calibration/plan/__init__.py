"""How many replicas keep a latency: work from the record pass, arrivals, and a simulation over both."""
