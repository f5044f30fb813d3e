use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use minijinja::syntax::SyntaxConfig;
use minijinja::{context, Environment, Error, ErrorKind, Value};

use crate::TextError;

/// What stands for an answer in a rendered conversation: answers are kept as tokens.
const ANSWER: &str = "[answer]";

/// A folder's chat template, rendered as transformers does.
pub struct ChatTemplate {
    environment: Environment<'static>,
    names: BTreeMap<String, String>, // special tokens, which templates use
    path: PathBuf,
}

impl ChatTemplate {
    /// Read a folder's template: chat_template.jinja, or the one in tokenizer_config.json.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, TextError> {
        let (config, path) =
            (folder.as_ref().join("tokenizer_config.json"), folder.as_ref().join("chat_template.jinja"));
        let wrong = |path: &Path, error: &dyn std::fmt::Display| TextError(format!("{}: {error}", path.display()));
        let read = |path: &Path| std::fs::read_to_string(path).map_err(|error| wrong(path, &error));
        let object: serde_json::Value = match config.exists() {
            true => serde_json::from_str(&read(&config)?).map_err(|error| wrong(&config, &error))?,
            false => serde_json::Value::Null,
        };
        let text = |value: &serde_json::Value| Some(value.as_str().or(value["content"].as_str())?.to_owned());
        let (template, path) = match (path.exists(), text(&object["chat_template"])) {
            (true, _) => (read(&path)?, path),
            (false, Some(template)) => (template, config),
            (false, None) => return Err(wrong(&path, &"is missing, and tokenizer_config.json has no chat_template")),
        };
        let tokens = object.as_object().into_iter().flatten().filter(|(name, _)| name.ends_with("_token"));
        let more = ["model_specific_special_tokens", "extra_special_tokens"].into_iter();
        let tokens = tokens.chain(more.filter_map(|key| object[key].as_object()).flatten());
        let names = tokens.filter_map(|(name, value)| Some((name.clone(), text(value)?))).collect();

        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| wrong(&path, &error))?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", |format: String| jiff::Zoned::now().strftime(&format).to_string());
        environment.add_template_owned("chat", template).map_err(|error| wrong(&path, &error))?;
        Ok(Self { environment, names, path })
    }

    /// Return the last message of a conversation with all that the template writes around it: from the end of the answer before it, or from
    /// the begin, to where its answer begins.
    pub fn turn(&self, system: Option<&str>, messages: &[&str]) -> Result<String, TextError> {
        let mut mark = ANSWER.to_owned();
        while messages.iter().chain(&system).any(|message| message.contains(&mark)) {
            mark = format!("[{mark}]");
        }
        let message = |role: &str, content: &str| context! { role, content };
        let mut conversation: Vec<Value> = system.iter().map(|content| message("system", content)).collect();
        for (i, content) in messages.iter().enumerate() {
            if i > 0 {
                conversation.push(message("assistant", &mark));
            }
            conversation.push(message("user", content));
        }
        let wrong = |error: &dyn std::fmt::Display| TextError(format!("{}: {error}", self.path.display()));
        let variables = context! { messages => conversation, add_generation_prompt => true, ..Value::from_pairs(self.names.clone()) };
        let template = self.environment.get_template("chat").map_err(|error| wrong(&error))?;
        let text = template.render(variables).map_err(|error| wrong(&error))?;
        if messages.len() < 2 {
            return Ok(text);
        }
        match text.rsplit_once(&mark) {
            Some((_, after)) => Ok(after.to_owned()),
            None => Err(wrong(&"does not render answers as they are")),
        }
    }
}
