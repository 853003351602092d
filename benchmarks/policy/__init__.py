"""How good the adaptive policy is: on simulated traces (`simulate`), live on the demo (`live`)."""
