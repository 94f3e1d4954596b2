"""What a run writes down and what a person sees of it."""
