"""How a run starts: the contract, the compile policy, the train step."""
