"""Each defect shown on the installed upstream, in fresh processes."""
