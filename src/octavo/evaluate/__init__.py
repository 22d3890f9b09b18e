"""What a cache format costs in quality: perplexity, divergence, agreement, retrieval."""
