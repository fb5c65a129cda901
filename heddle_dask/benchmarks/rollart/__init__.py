"""RollArt's evaluation in virtual time: ``heddle bench rollart``."""
