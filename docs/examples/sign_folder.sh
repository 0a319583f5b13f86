#!/bin/sh
# Sign a BCQ folder with a key of your own, and verify it: sh sign_folder.sh FOLDER KEYS
#
# FOLDER.sig is written next to the folder, never into it: a signature cannot be one of the files that it covers.
# KEYS/private.pem and KEYS/public.pem are made when they are not there. Needs openssl, bcqfmt, and
# pip install model-signing pyopenssl
set -eu

folder=${1:?usage: sh sign_folder.sh FOLDER KEYS}
keys=${2:?usage: sh sign_folder.sh FOLDER KEYS}
folder=${folder%/}
signing=${MODEL_SIGNING:-model_signing}

if [ ! -e "$keys/private.pem" ]; then
    mkdir -p "$keys"
    (umask 077 && openssl ecparam -name prime256v1 -genkey -noout -out "$keys/private.pem")
    openssl ec -in "$keys/private.pem" -pubout -out "$keys/public.pem" 2>/dev/null
fi

# A signature says who, not what: look first whether every byte is what the manifest promises.
bcqfmt validate --deep "$folder"

"$signing" sign key "$folder" --private_key "$keys/private.pem" --signature "$folder.sig"

# What the receiver runs, with the public key from somewhere they trust.
"$signing" verify key "$folder" --public_key "$keys/public.pem" --signature "$folder.sig"
