"""What a run leaves for others: pages that hold their films and records, runs that are played again, boards, cards."""
