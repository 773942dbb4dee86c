//! What can go wrong.

use std::fmt;

/// The outcome of a call.
pub type Result<T> = std::result::Result<T, Error>;

/// Says what went wrong. Each text names the field, what was expected and what came.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The address is none of a native wire, or the key would travel unencrypted to it.
    BadAddress(String),
    /// An observation that cannot be sent. What the server refuses is [`Error::Server`], with the same code.
    BadObservation(String),
    /// There was no answer in time; the next call opens another connection.
    Timeout(String),
    /// The connection broke, or nobody of this protocol answers; the next call opens another.
    ConnectionLost(String),
    /// The reply is no reply to this request; the next call opens another connection.
    BadReply(String),
    /// A chunk that must not be executed: not finite, outside the limits, too long, or of another adapter.
    UnsafeChunk(String),
    /// The server refused, with one of the codes of docs/troubleshooting.md: `busy`, `superseded`, `deadline`, `unauthorized` ...
    Server {
        /// What a program decides by.
        code: String,
        /// What a person reads.
        message: String,
    },
}

impl Error {
    /// Return the code by which a program decides, the same in every language's client.
    pub fn code(&self) -> &str {
        match self {
            Error::BadAddress(_) => "bad_address",
            Error::BadObservation(_) => "bad_observation",
            Error::Timeout(_) => "timeout",
            Error::ConnectionLost(_) => "connection_lost",
            Error::BadReply(_) => "bad_reply",
            Error::UnsafeChunk(_) => "unsafe_chunk",
            Error::Server { code, .. } => code,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Error::BadAddress(message)
        | Error::BadObservation(message)
        | Error::Timeout(message)
        | Error::ConnectionLost(message)
        | Error::BadReply(message)
        | Error::UnsafeChunk(message)
        | Error::Server { message, .. }) = self;
        write!(to, "{message} [{}]", self.code())
    }
}

impl std::error::Error for Error {}
