"""Reports about runs, as pages or text: the policy's trajectories and the course of a run."""
