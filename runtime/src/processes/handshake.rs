//! Whether both ends of a connection know the run's token: each sends a number used once and the
//! keyed hash (BLAKE3) of both numbers and of its own side. The token itself is never sent.

use std::fmt;
use std::io::{Read, Write};

/// The first bytes of every connection; the last one is the version of the protocol.
pub(super) const MAGIC: [u8; 8] = *b"mshwrt\0\x01";

/// The secret of a run, of 256 bits.
#[derive(Clone, PartialEq, Eq)]
pub struct Token([u8; 32]);

/// Why a text is no token, or none could be made.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// Not 64 hexadecimal digits.
    #[error("a token is 64 hexadecimal digits, and this is not")]
    Text,
    /// The system gives no random numbers.
    #[error("the system gives no random numbers for a token: {0}")]
    Random(String),
}

impl Token {
    /// A new one.
    pub fn random() -> Result<Self, TokenError> {
        random().map(Token)
    }
    /// Reads 64 hexadecimal digits.
    pub fn parse(text: &str) -> Result<Self, TokenError> {
        let hash = blake3::Hash::from_hex(text.trim()).map_err(|_| TokenError::Text)?;
        Ok(Token(*hash.as_bytes()))
    }
    /// Its 64 hexadecimal digits.
    pub fn reveal(&self) -> String {
        blake3::Hash::from_bytes(self.0).to_hex().to_string()
    }
    fn proof(&self, side: &[u8], nonces: [&[u8; 32]; 2]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(side);
        nonces.iter().for_each(|n| {
            hasher.update(&n[..]);
        });
        hasher.finalize()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(secret)")
    }
}

/// Why a connection is not one of the run.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    /// It broke.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The other end speaks something else.
    #[error("what answers there is no Meshwright of this version")]
    Stranger,
    /// The other end has another token.
    #[error("its token is another one")]
    Token,
    /// None of our own.
    #[error(transparent)]
    Random(#[from] TokenError),
}

fn random() -> Result<[u8; 32], TokenError> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|e| TokenError::Random(e.to_string()))?;
    Ok(bytes)
}

fn receive<const N: usize>(from: &mut impl Read) -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// The side that connected.
pub(super) fn call(stream: &mut (impl Read + Write), token: &Token) -> Result<(), HandshakeError> {
    let mine = random()?;
    stream.write_all(&[&MAGIC[..], &mine].concat())?;
    if receive(stream)? != MAGIC {
        return Err(HandshakeError::Stranger);
    }
    let theirs = receive(stream)?;
    let proof = blake3::Hash::from_bytes(receive(stream)?);
    // Equality of hashes takes the same time wherever they differ.
    if proof != token.proof(b"answers", [&mine, &theirs]) {
        return Err(HandshakeError::Token);
    }
    stream.write_all(token.proof(b"calls", [&mine, &theirs]).as_bytes())?;
    Ok(())
}

/// The side that was connected to.
pub(super) fn answer(
    stream: &mut (impl Read + Write),
    token: &Token,
) -> Result<(), HandshakeError> {
    let magic: [u8; 8] = receive(stream)?;
    if magic != MAGIC {
        // One of another version is told of this one, so that it can say what is wrong.
        if magic[..7] == MAGIC[..7] {
            stream.write_all(&MAGIC)?;
        }
        return Err(HandshakeError::Stranger);
    }
    let (theirs, mine) = (receive(stream)?, random()?);
    let proof = token.proof(b"answers", [&theirs, &mine]);
    stream.write_all(&[&MAGIC[..], &mine, proof.as_bytes()].concat())?;
    let proof = blake3::Hash::from_bytes(receive(stream)?);
    match proof == token.proof(b"calls", [&theirs, &mine]) {
        true => Ok(()),
        false => Err(HandshakeError::Token),
    }
}
