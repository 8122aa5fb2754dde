"""A layerwise weight update of vLLM: its session and the rules that patches add to it."""
