# A regular package, so that no `tests` of some other distribution can stand in front of it on sys.path.
