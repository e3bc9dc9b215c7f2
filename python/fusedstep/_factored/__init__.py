"""Steps with factored second moments."""
