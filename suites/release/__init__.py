"""What the adopted torch's release promises, held on the devices that are here."""
