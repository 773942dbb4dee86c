"""What may take part in a control loop beside its policy, a file each. A loop imports only those that it is handed."""
