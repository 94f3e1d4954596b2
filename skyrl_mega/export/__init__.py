"""From a run's distributed checkpoint to a Hugging Face directory: in parallel, in bounded memory, without a GPU."""
