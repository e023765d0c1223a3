"""Many candidates, each tried in a process of its own, and the ones worth having."""
