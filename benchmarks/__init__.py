"""Questions with numbers for answers: one file per question."""
