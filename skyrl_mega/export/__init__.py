"""The export of a run's checkpoint to a Hugging Face directory: in parallel, in bounded memory, without a GPU."""
