"""Pages and text about runs, for people: what the policy did, and how a run went."""
