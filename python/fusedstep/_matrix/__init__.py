"""Steps of matrices: Newton-Schulz iterations, low-rank projections."""
