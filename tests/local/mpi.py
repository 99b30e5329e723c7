"""What lets Open MPI start tests: as root, and with more ranks than cores. Other MPIs do not read it."""

FOR_OPEN_MPI = {
    **{"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
