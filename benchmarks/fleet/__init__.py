"""A fleet of 1 to 1,000 simulated workers behind the production code of placement and admission."""
