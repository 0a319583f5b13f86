"""What a checkpoint holds, for people: summaries, details of a tensor, comparisons."""
