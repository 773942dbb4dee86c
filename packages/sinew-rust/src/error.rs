//! The errors of the client.

use std::fmt;

/// The result of a call.
pub type Result<T> = std::result::Result<T, Error>;

/// The error of a call. The text contains the field, the expected value and the actual value.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The address does not have a supported form, or the key would travel to it unencrypted.
    BadAddress(String),
    /// The client cannot send this observation. If the server rejects an observation, the error is [`Error::Server`]
    /// with the same code.
    BadObservation(String),
    /// The server did not answer in time. The next call opens a new connection.
    Timeout(String),
    /// The connection broke, or no server with this protocol answers. The next call opens a new connection.
    ConnectionLost(String),
    /// The reply is malformed or belongs to another request. The next call opens a new connection.
    BadReply(String),
    /// The robot must not execute the chunk: an action is not finite or outside the limits, the chunk is too long, or
    /// another adapter computed it.
    UnsafeChunk(String),
    /// The server rejected the request. docs/troubleshooting.md lists the codes, such as `busy`, `superseded`,
    /// `deadline` and `unauthorized`.
    Server {
        /// The code for programs.
        code: String,
        /// The text for people.
        message: String,
    },
}

impl Error {
    /// Return the error's code for programs. All clients, in every language, use the same codes.
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
