"""`python -m ultra_patches` is `ultra-patches`."""

from ultra_patches.cli import main

raise SystemExit(main())
