"""The token of an account that is logged in on this machine: a file that trainers read.

The owner of the lab's folder has one of its own (`owner_token`).
"""

from nebula_jax.security import private_files
from nebula_jax.security.accounts import owner_token
from nebula_jax.security.membership import site_folder

NAME = "token"  # in the work folder of the account


def read(folder: site_folder.Folder, account: str) -> str:
    """Returns the token of an account that has logged in; of the owner if empty.

    Args:
      folder: of the lab.
      account: its name, or empty.

    Raises:
      private_files.PrivateFileError: if it has not, or others can read the file.
    """
    if not account:
        return owner_token.read(folder.path)
    path = folder.user(account) / NAME
    if not path.exists():
        raise private_files.PrivateFileError(
            f"{account} is not logged in: nebula login {account}"
        )
    return private_files.read(path).strip()
