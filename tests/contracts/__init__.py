"""Other projects' tests of OpenAI servers, run against a Prism server; their sources are fetched, never kept here."""
