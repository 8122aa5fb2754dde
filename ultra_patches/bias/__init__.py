"""The fp32 router bias: which names it has, how it is held, what it does to compiled code."""
