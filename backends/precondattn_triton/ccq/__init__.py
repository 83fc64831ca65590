"""CCQ's query, contracted by the covariance of the keys."""
