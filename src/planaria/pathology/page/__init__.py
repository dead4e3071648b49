"""The viewer's files; OpenSeadragon is put beside them by :mod:`planaria.pathology.vendor`."""
