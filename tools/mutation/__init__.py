"""Mutation testing of the product: small edits of its source, each of which some test must turn red.

cosmic-ray makes the edits. It edits files on disk, so that child processes, torch.compile and the Triton interpreter
see them; mutmut patches functions of one process instead, which a compiled model never calls. cosmic-ray runs one test
command for everything; here each mutant has the tests that depend on its file, the nearest first.
"""
