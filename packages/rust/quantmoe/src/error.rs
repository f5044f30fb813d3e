use std::fmt;
use std::path::{Path, PathBuf};

use quantmoe_text::TextError;

/// Why a model cannot be opened or cannot answer.
#[derive(Debug)]
pub enum Error {
    /// ONNX Runtime is missing, refuses the model, or fails.
    Runtime(String),
    /// A file cannot be read or written.
    File(PathBuf, std::io::Error),
    /// A file is damaged or of another model, or the model cannot do what is asked.
    Invalid(String),
    /// An argument is outside its range.
    Argument(String),
    /// The tokenizer cannot be read or fails.
    Text(TextError),
    /// The model is closed, or was closed while it answered.
    Closed,
    /// The answer was cancelled.
    Cancelled,
}

impl Error {
    pub(crate) fn file(path: &Path, error: std::io::Error) -> Self {
        Self::File(path.to_owned(), error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Runtime(text) | Self::Invalid(text) | Self::Argument(text) => f.write_str(text),
            Self::File(path, error) => write!(f, "{}: {error}", path.display()),
            Self::Text(error) => error.fmt(f),
            Self::Closed => f.write_str("the model is closed; open it again"),
            Self::Cancelled => f.write_str("the answer was cancelled"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::File(_, error) => Some(error),
            Self::Text(error) => Some(error),
            _ => None,
        }
    }
}

impl<R> From<ort::Error<R>> for Error {
    fn from(error: ort::Error<R>) -> Self {
        Self::Runtime(error.message().to_owned())
    }
}

impl From<TextError> for Error {
    fn from(error: TextError) -> Self {
        Self::Text(error)
    }
}
