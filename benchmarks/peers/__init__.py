"""Other systems that answer the same prompts, each in its own process and virtual environment, through one
line protocol.
"""
