"""`python -m ddtree_deploy` is `ddtree-deploy`."""

from ddtree_deploy.cli import main

main()
