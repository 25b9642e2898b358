import sys

from umbra.trainer.doctor.doctor import main

sys.exit(main(sys.argv[1:]))
