"""A device and process groups that only pretend, on a CPU: for the planner's clock and for the stream checker."""
