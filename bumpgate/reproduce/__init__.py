"""From a red row to a file that upstream can run: inlined, reduced, and proved in both environments."""
