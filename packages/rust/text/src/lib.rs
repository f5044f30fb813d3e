//! What is between text and the inputs and outputs of an exported model: its tokenizer.json, text as tokens come, and sampling.

mod c_interface;
mod chat_template;
mod java_interface;
mod sampling;
mod text_stream;

pub use chat_template::ChatTemplate;
pub use sampling::{Sampler, Sampling};
pub use text_stream::TextStream;

use std::fmt;
use std::path::Path;

/// Why a file cannot be read or a text not be taken.
#[derive(Debug, Clone)]
pub struct TextError(pub String);

impl fmt::Display for TextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TextError {}

/// A folder's tokenizer.json. Any number of threads may use it.
pub struct TextTokenizer {
    tokenizer: tokenizers::Tokenizer,
}

impl TextTokenizer {
    /// Read the tokenizer.json of a folder. Truncation and padding are off.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, TextError> {
        let path = folder.as_ref().join("tokenizer.json");
        let name = path.display();
        if !path.exists() {
            return Err(TextError(format!(
                "{name} is missing: the model takes token ids; the folder's README.md says why. Use TokenCache"
            )));
        }
        let mut tokenizer =
            tokenizers::Tokenizer::from_file(&path).map_err(|error| TextError(format!("{name}: {error}")))?;
        tokenizer.with_truncation(None).map_err(|error| TextError(format!("{name}: {error}")))?.with_padding(None);
        Ok(Self { tokenizer })
    }

    /// Return the token ids of a text; `special`: with the special tokens at the begin and end of a text.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<i64>, TextError> {
        let found = self.tokenizer.encode_fast(text, special).map_err(|error| TextError(error.to_string()))?;
        Ok(found.get_ids().iter().map(|&id| id as i64).collect())
    }

    /// Return the text of token ids; `special`: with the special tokens among them.
    pub fn decode(&self, ids: &[i64], special: bool) -> Result<String, TextError> {
        let wrong = |id: &i64| TextError(format!("{id}: expected a token id from 0 to {}", u32::MAX));
        let ids = ids.iter().map(|id| u32::try_from(*id).map_err(|_| wrong(id))).collect::<Result<Vec<_>, _>>()?;
        self.tokenizer.decode(&ids, !special).map_err(|error| TextError(error.to_string()))
    }
}
