"""What others wrote for the same purpose, behind the protocol of the engine process, for comparisons.

A peer gets the same memory, the same types and the same rule for sampling as Specter's own engine, and is otherwise
what its users get. Settings of drafts and slots mean nothing to it.
"""
