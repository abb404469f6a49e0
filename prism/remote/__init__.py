"""What engines say to each other when one runs layers for another: messages and their transport."""
