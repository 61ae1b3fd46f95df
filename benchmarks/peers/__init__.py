"""Other systems that answer the same prompts, each in a process and virtual environment of its own behind one
line protocol.
"""
